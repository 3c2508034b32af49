"""A run in progress, for tests that do something to it."""

import os
import subprocess
import tempfile
import time

from program import OB1, PATIENCE, command, environment, launched as environment_of_ranks


class Running:
    """A run in progress; what it writes is collected in files, so that no pipe ever fills."""

    def __init__(self, test, arguments, ranks=0, stdout=None, launched=None, **options):
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen(command(arguments, ranks, OB1) if launched is None else launched,
                                        stdin=subprocess.DEVNULL, stdout=self.out if stdout is None else stdout,
                                        stderr=self.err, env=environment_of_ranks() if ranks else environment(), **options)
        test.addCleanup(self.err.close)
        test.addCleanup(self.out.close)
        test.addCleanup(self.process.wait)
        test.addCleanup(self.process.kill)

    @staticmethod
    def text(file):
        return os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")

    def until(self, condition, seconds=60):
        end = time.monotonic() + seconds * PATIENCE
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"did not get there: {self.text(self.err)}")
            time.sleep(0.01)
        return self

    def producing(self):
        return self.until(lambda: len(self.text(self.out)) > 20)

    def finished(self):
        start = time.monotonic()
        code = self.process.wait(60 * PATIENCE)
        return code, self.text(self.out), self.text(self.err), time.monotonic() - start
