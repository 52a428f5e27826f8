"""Access to a server that runs elsewhere, for the command line: no torch and no engine."""
