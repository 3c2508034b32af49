"""Submits every shipped script to a real Slurm, as its comments say, and reads output, exit code, job state and accounting."""

import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest

import cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("DSV41_BINARY_DIR", ROOT / "build/release/bin"))


class Scripts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(cluster.Cluster())
        cls.directory = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.directory, ignore_errors=True)
        # Long enough to be interrupted: the small random checkpoint with room for more text than anybody waits for.
        model = cls.directory / "endless"
        shutil.copytree(ROOT / "tests/checkpoints/mini", model)
        config = json.loads((model / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = 100_000
        (model / "config.json").chmod(0o644)
        (model / "config.json").write_text(json.dumps(config))
        cls.endless = f"--model {model} --ignore-eos -n 90000 --speculate off"

    def submit(self, script, *options, wait=True, **variables):
        exported = ",".join(["ALL", f"DSV41={BIN}/dsv41-mpi", *(f"{k}={v}" for k, v in variables.items())])
        command = ["sbatch", "--parsable", f"--chdir={self.directory}", "--output=job-%j.out", "--error=job-%j.err",
                   f"--export={exported}", *(["--wait"] if wait else []), *options, str(ROOT / "slurm" / script)]
        done = self.cluster.run(*command, timeout=240)
        self.assertRegex(done.stdout, r"^\d+", done.stderr)
        return int(re.match(r"\d+", done.stdout).group()), done.returncode

    def output(self, job):
        return (self.directory / f"job-{job}.out").read_text(), (self.directory / f"job-{job}.err").read_text()

    def wait_for(self, what, ready, seconds=90):
        end = time.monotonic() + seconds
        while not ready():
            self.assertLess(time.monotonic(), end, f"waited {seconds} s for {what}")
            time.sleep(0.2)

    def check_ended(self, job, state, exit_code):
        """The same in the controller's memory and in the accounting, which may take a moment."""
        self.assertEqual(self.cluster.state(job)["JobState"], state)
        self.wait_for("the accounting", lambda: self.cluster.accounted(job))
        last = self.cluster.accounted(job)[-1]
        self.assertEqual((last["JobState"], last["ExitCode"]), (state, exit_code))

    def answers(self, script, *options, **variables):
        job, code = self.submit(script, *options, **variables)
        out, err = self.output(job)
        if code != 0:
            err += self.cluster.logs()
        self.assertEqual((code, out), (0, " Paris."), err)
        self.check_ended(job, "COMPLETED", "0:0")
        return err

    def test_several_nodes_with_srun(self):
        err = self.answers("dsv41-mpi.sbatch", "--nodes=3", "--ntasks=5")
        self.assertIn("4 expert ranks", err)

    def test_one_node(self):
        err = self.answers("one-node-gpus.sbatch", "--gres=none", "--ntasks=3")
        self.assertIn("2 expert ranks", err)

    def test_cpu_only(self):
        self.assertIn("3 expert ranks", self.answers("cpu-only.sbatch", "--ntasks-per-node=2"))

    def test_heterogeneous(self):
        self.assertIn("2 expert ranks", self.answers("heterogeneous.sbatch"))

    def test_array(self):
        prompts = self.directory / "prompts.txt"
        prompts.write_text("The capital of France is\nThe capital of Japan is\n")
        job, code = self.submit("array.sbatch", "--output=array-%a.out", PROMPTS=prompts)
        self.assertEqual(code, 0)
        self.assertEqual([(self.directory / f"array-{i}.out").read_text() for i in (1, 2)], [" Paris.", " Tokyo."])

    def test_a_refused_prompt_gives_the_exit_code(self):
        job, code = self.submit("dsv41-mpi.sbatch", "--ntasks=2", OPTIONS="--no-such-flag")
        self.assertNotEqual(code, 0)
        self.check_ended(job, "FAILED", "2:0")
        self.assertIn("--no-such-flag", self.output(job)[1])

    def start_endless(self, *options):
        job, _ = self.submit("dsv41-mpi.sbatch", "--ntasks=2", *options, wait=False, OPTIONS=self.endless)
        self.wait_for("text", lambda: (self.directory / f"job-{job}.out").exists() and self.output(job)[0] != "")
        return job

    def ended(self, job):
        return self.cluster.state(job).get("JobState") not in ("PENDING", "RUNNING", "COMPLETING", None)

    def stopped_gracefully(self, job):
        self.wait_for("the end", lambda: self.ended(job), 120)
        self.check_ended(job, "COMPLETED", "0:0")
        self.assertIn("finish: stopped", self.output(job)[1])

    def test_the_signal_before_the_limit_ends_gracefully(self):
        # Slurm looks at time limits twice a minute, so the signal comes between now and half a minute from now.
        job = self.start_endless("--time=1", "--signal=B:USR1@45")
        self.stopped_gracefully(job)

    def test_a_signal_by_hand_ends_gracefully(self):
        job = self.start_endless()
        self.cluster.run("scancel", "--batch", "--signal=USR1", str(job))
        self.stopped_gracefully(job)

    def test_scancel(self):
        job = self.start_endless()
        self.cluster.run("scancel", str(job))
        self.wait_for("the end", lambda: self.ended(job))
        self.assertEqual(self.cluster.state(job)["JobState"], "CANCELLED")
        self.wait_for("the accounting", lambda: self.cluster.accounted(job))
        self.assertEqual(self.cluster.accounted(job)[-1]["JobState"], "CANCELLED")
        self.assertGreater(len(self.output(job)[0]), 0)  # text already produced stays

    def test_a_rank_that_is_killed_fails_the_job(self):
        job = self.start_endless()
        mark = f"SLURM_JOB_ID={job}".encode()
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                variables = (path / "environ").read_bytes().split(b"\0")
                if mark in variables and b"SLURM_PROCID=1" in variables and os.readlink(path / "exe") == str(BIN / "dsv41-mpi"):
                    os.kill(int(path.name), signal.SIGKILL)
            except OSError:
                pass  # it is gone
        self.wait_for("the end", lambda: self.ended(job))
        self.assertEqual(self.cluster.state(job)["JobState"], "FAILED")
        self.assertIn("task 1: Killed", self.output(job)[1])
        self.assertGreater(len(self.output(job)[0]), 0)

    def test_requeue(self):
        job = self.start_endless()
        self.cluster.run("scontrol", "requeue", str(job))
        self.wait_for("the queue", lambda: self.cluster.state(job)["JobState"] == "PENDING")
        self.cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")  # Slurm would wait two minutes
        self.wait_for("the second start", lambda: self.cluster.state(job).get("Restarts") == "1" and
                      self.cluster.state(job)["JobState"] == "RUNNING", 120)
        self.cluster.run("scancel", str(job))
        self.wait_for("the end", lambda: self.ended(job))


if __name__ == "__main__":
    reason = cluster.missing()
    if reason:
        print(f"skipped: {reason}")
        sys.exit(77)
    unittest.main()
