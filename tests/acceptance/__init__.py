"""What users do, by the command line, the documented Python API and files on disk alone."""
