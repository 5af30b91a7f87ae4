"""Hardware and software of this machine, and its load during measurements."""
