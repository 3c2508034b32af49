"""A real Slurm on this machine for the length of a test: munged, slurmctld and one slurmd per virtual node.

Everything lives in one temporary directory (keys, sockets, state, logs) and ends with the context.
"""

import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "mpirun")


def missing():
    """What keeps a cluster from starting here, or None."""
    if os.geteuid() != 0:
        return "starting slurmd takes root"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


class Cluster:
    def __init__(self, nodes=3, cores=4):
        self.nodes, self.cores = nodes, cores
        self.processes = []

    def __enter__(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="slurm"))
        self.directory.chmod(0o755)
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        host = socket.gethostname().split(".")[0]
        munge = self.directory / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        # A free block of ports: the controller's, then one per node.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = 20000 + probe.getsockname()[1] % 20000
        # Each node has its own temporary directory: PMIx servers of two nodes must not meet in one.
        for name in ("state", *(f"{kind}/node{node}" for kind in ("spool", "tmp") for node in range(1, self.nodes + 1))):
            (self.directory / name).mkdir(parents=True)
        (self.directory / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={munge}/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
TmpFS={self.directory}/tmp/%n
StateSaveLocation={self.directory}/state
SlurmdSpoolDir={self.directory}/spool/%n
SlurmctldPidFile={self.directory}/slurmctld.pid
SlurmdPidFile={self.directory}/slurmd-%n.pid
SlurmctldLogFile={self.directory}/slurmctld.log
SlurmdLogFile={self.directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
MinJobAge=3600
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=2
JobCompType=jobcomp/filetxt
JobCompLoc={self.directory}/completed
NodeName=node[1-{self.nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{port + 1}-{port + self.nodes}] CPUs={self.cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
""")
        (self.directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
        self.daemon("munged", "--foreground", f"--socket={munge}/socket", f"--key-file={key}", f"--pid-file={munge}/pid",
                    f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--force")
        self.wait_for(lambda: (munge / "socket").exists(), "munged")
        self.daemon("slurmctld", "-D", "-c")
        for node in range(1, self.nodes + 1):
            self.daemon("slurmd", "-D", "-N", f"node{node}")
        self.wait_for(lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", str(self.nodes)], "slurmd", 90)

    def environment(self, **extra):
        # Virtual nodes share a host name, and Open MPI names its shared memory by host name: ranks of two nodes would meet in one
        # segment. Between real nodes that cannot happen.
        values = dict(os.environ, OMPI_MCA_btl="self,tcp", SLURM_CONF=str(self.directory / "slurm.conf"), OMPI_ALLOW_RUN_AS_ROOT="1",
                      OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", PATH=os.environ["PATH"] + ":/usr/sbin:/sbin")
        return {**values, **extra}

    def daemon(self, *command):
        with open(self.directory / f"{command[0]}.out", "ab") as log:
            self.processes.append(subprocess.Popen(command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=log,
                                                   stderr=log, start_new_session=True))

    def wait_for(self, ready, what, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if ready():
                return
            time.sleep(0.2)
        raise RuntimeError(f"{what} did not come up within {seconds} s\n{self.logs()}")

    def logs(self):
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.directory.glob("*.log"))

    def run(self, *command, timeout=120, **extra):
        return subprocess.run(command, env=self.environment(**extra), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=timeout, text=True)

    def state(self, job):
        """{"JobState": …, "ExitCode": …, "Restarts": …} of a job. A controller that is busy is asked again."""
        end = time.monotonic() + 60
        while True:
            shown = self.run("scontrol", "show", "job", "-o", str(job))
            fields = dict(field.split("=", 1) for field in shown.stdout.split() if "=" in field)
            if "JobState" in fields:
                return fields
            if time.monotonic() > end:
                raise RuntimeError(f"scontrol does not tell about job {job}: {shown.stderr}\n{self.logs()}")
            time.sleep(0.5)

    def accounted(self, job):
        """What the accounting of completed jobs says about a job: a list of {"JobState": …, "ExitCode": …}, one per completion."""
        path = self.directory / "completed"
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [dict(field.split("=", 1) for field in line.split() if "=" in field) for line in lines]
        return [entry for entry in entries if entry.get("JobId") == str(job)]

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
