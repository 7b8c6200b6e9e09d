"""``python -m lazytensor`` is the ``lazytensor`` command."""

from lazytensor.cli.app import main

if __name__ == "__main__":
    main()
