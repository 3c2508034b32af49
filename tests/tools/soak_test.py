"""A long run: requests of mixed lengths back to back for DSV41_SOAK_SECONDS (an hour), four ranks. Every answer to the
same request is the same, and once warm no rank holds more memory, descriptors or mappings. Prints the figures in Markdown.
Standard library only.
"""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time

from program import CHECKPOINTS, command, environment, ranks_of

SECONDS = int(os.environ.get("DSV41_SOAK_SECONDS", "3600"))
RANKS = 4
SAMPLES = 240  # evenly over the time
WARM = 0.2     # of the time
REQUESTS = 60  # different ones
GROWTH_KB = 2048  # what the measurement of memory itself may vary by


def make_requests():
    draw = random.Random(20261130)
    requests = []
    for number in range(REQUESTS):
        length = draw.choice((1, 2, 7, 16, 33, 64, 150, 400, 900))
        request = {"prompt_ids": [0] + [draw.randrange(3, 760) for _ in range(length - 1)],
                   "max_tokens": draw.choice((1, 3, 12, 40)), "ignore_eos": number % 3 > 0}
        if number % 2:
            request.update(temperature=0.8, top_p=0.9, seed=number)
        requests.append(request)
    return requests


def sample(process):
    """Memory of the process itself (kB; pages of files come and go with the page cache), descriptors, mappings."""
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
    return {"anonymous": int(status["RssAnon"].split()[0]), "resident": int(status["VmRSS"].split()[0]),
            "descriptors": len(list((process / "fd").iterdir())),
            "mappings": (process / "maps").read_text().count("\n"), "threads": int(status["Threads"])}


class Soak:
    def __init__(self, directory):
        self.requests, self.answers, self.finished, self.wrong = make_requests(), {}, 0, []
        self.results = directory / "results"
        os.mkfifo(self.results)
        arguments = ["--model", CHECKPOINTS / "mini", "--requests", "-", "--out", self.results, "--batch", "8"]
        self.errors = open(directory / "errors", "w+b")
        self.process = subprocess.Popen(command(arguments, ranks=RANKS), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                        stderr=self.errors, env=environment())
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.feed, daemon=True), threading.Thread(target=self.read, daemon=True)]
        for thread in self.threads:
            thread.start()

    def feed(self):
        draw = random.Random(1)
        try:
            while not self.stop.is_set():
                number = draw.randrange(REQUESTS)
                self.process.stdin.write(json.dumps({"id": str(number), **self.requests[number]}).encode() + b"\n")
                self.process.stdin.flush()
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # the job has ended, which the caller sees

    def read(self):
        with open(self.results) as results:
            for line in results:
                entry = json.loads(line)
                answer = (entry.get("output_ids"), entry.get("finish"))
                if answer != self.answers.setdefault(entry["id"], answer) or "error" in entry:
                    self.wrong.append(line)
                self.finished += 1


def main():
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(pathlib.Path(name))
        start = time.monotonic()
        ranks, samples = {}, []
        try:
            while time.monotonic() - start < SECONDS and soak.process.poll() is None:
                time.sleep(SECONDS / SAMPLES)
                ranks = ranks if len(ranks) == RANKS else ranks_of(soak.process.pid)
                try:
                    samples.append((time.monotonic() - start, {rank: sample(pathlib.Path(f"/proc/{pid}")) for rank, pid in ranks.items()}))
                except OSError:
                    break  # a rank is gone
            alive = soak.process.poll() is None
            soak.stop.set()
            code = soak.process.wait(300)
            for thread in soak.threads:
                thread.join(60)
        finally:
            soak.process.kill()
            soak.process.wait()
        soak.errors.seek(0)
        errors = soak.errors.read().decode(errors="replace")
    failures = [] if alive and code == 0 else [f"ended early or badly, code {code}: {errors}"]
    failures += soak.wrong[:3]
    if len(soak.answers) < REQUESTS:
        failures.append(f"only {len(soak.answers)} of {REQUESTS} requests were ever answered")
    summary = re.search(r"\d+ requests finished.*", errors)
    print(f"{SECONDS} s, {RANKS} ranks, {REQUESTS} kinds of requests; {summary[0] if summary else 'no summary'}\n")
    print("| rank | what | first | warm: least | most | last quarter: most |\n|---|---|---|---|---|---|")
    warm = [values for seconds, values in samples if WARM * SECONDS <= seconds < 0.75 * SECONDS and len(values) == RANKS]
    late = [values for seconds, values in samples if seconds >= 0.75 * SECONDS and len(values) == RANKS]
    if not warm or not late:
        failures.append("too few samples")
    else:
        for rank in range(RANKS):
            for what in samples[0][1].get(rank, warm[0][rank]):
                before, after = [v[rank][what] for v in warm], [v[rank][what] for v in late]
                first = next(values[rank][what] for _, values in samples if rank in values)
                print(f"| {rank} | {what} | {first} | {min(before)} | {max(before)} | {max(after)} |")
                allowed = max(before) + (GROWTH_KB if what in ("anonymous", "resident") else 0)
                if max(after) > allowed:
                    failures.append(f"rank {rank}: {what} grows from {max(before)} to {max(after)}")
    print("\n" + ("\n".join(failures) or "flat"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
