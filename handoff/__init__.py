"""The command line, and nothing else: every sub-command is a thin call into the packages below."""
