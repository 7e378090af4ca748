"""A stand-in for a stage: what each rank does is given by its argument, `rank:behaviour,...`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mcore_rl.errors import EngineDied
from mcore_rl.guard import die_with_parent, end_on_sigterm, on_uncaught
from mcore_rl.progress import progress_stream
from mcore_rl.run_folder import RunFolder

folder, plan = RunFolder(Path(sys.argv[1])), dict(part.split(":") for part in sys.argv[2].split(","))
rank = int(os.environ["RANK"])
behaviour = plan.get(str(rank), "ok")
die_with_parent()
end_on_sigterm()
on_uncaught(rank, folder.rank_error(rank))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder.root / f"pids{rank}").write_text(f"{os.getpid()} {child.pid}")
print(f"rank {rank} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_PORT']}")
if rank == 0:
    progress_stream().write("progress of rank 0\n")
    progress_stream().flush()
while not all((folder.root / f"pids{other}").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.02)
if behaviour == "ok":
    child.kill()
elif behaviour == "value":
    raise ValueError("layout.tp=3 is wrong\n in two lines")
elif behaviour == "engine":
    raise EngineDied("engine owned[0] died; log: runs/x/logs/engine0.log")
elif behaviour == "echo":
    raise RuntimeError("[enforce fail] gloo: Connection closed by peer [127.0.0.1]:1234")
elif behaviour == "sigkill":
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "exit":
    sys.exit("bad luck")
elif behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
elif behaviour == "hang":
    time.sleep(600)
