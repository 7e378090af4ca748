"""Runs the stand-in ranks as the launcher runs real ones: `launcher.py FOLDER PLAN WORLD`."""

import sys
from pathlib import Path

from mcore_rl.ranks import run_ranks
from mcore_rl.run_folder import RunFolder

if __name__ == "__main__":
    root, plan, world = sys.argv[1], sys.argv[2], int(sys.argv[3])
    stage = [sys.executable, str(Path(__file__).with_name("stage.py")), root, plan]
    outcome = run_ranks(stage, world=world, folder=RunFolder(Path(root)), env={}, term_grace_s=2.0)
    sys.stderr.write(outcome.message + "\n")
    sys.exit(outcome.exit_code)
