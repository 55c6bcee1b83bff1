"""The command line: ``peaksim <command>``, generated from the dataclasses of ``engine.cli.commands``.

Importing it loads no model and not even torch, so that ``--help`` answers at once.
"""

from engine.cli.main import main

__all__ = ["main"]
