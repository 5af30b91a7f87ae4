"""Tools shared by the folders of frameworks: rules, launch files in and out, logs."""
