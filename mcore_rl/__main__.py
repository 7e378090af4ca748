"""`python -m mcore_rl` and the `mcore-rl` command."""

from mcore_rl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
