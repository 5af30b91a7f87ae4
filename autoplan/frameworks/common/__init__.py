"""Code shared by the framework folders: rules, reading and writing of launch files, logs."""
