"""The command line.

``app`` is the manual's table of contents, ``mounts`` brings in the commands that others provide, and each further
file is one command.  No file here but ``stand_in`` imports lazytensor or torch when it is imported, so that the manual
opens at once (see ``lazytensor_cli``); commands import what they need when they run.
"""
