"""Ranks with a GPU, as users run them: the kernels' own code on emulated devices, mixed with CPU ranks in one job, gives the
same bytes; what each rank computes on is said; what cannot be had is refused with one line; devices that fail or hang end the job."""

import pathlib
import shutil
import tempfile
import unittest

from program import CHECKPOINTS, OB1, PATIENCE, UCX, run

MINI = CHECKPOINTS / "mini"
IDS = "0,5,9,33,7,12"


class Jobs(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def job(self, *arguments, ids=IDS, **options):
        return run(["--model", MINI, "--prompt-ids", ids, "-n", "2", "--ignore-eos", *arguments], **options)

    def dump(self, *arguments, **options):
        path = self.directory / "logits.h5"
        result = self.job("--dump-logits", path, *arguments, **options)
        self.assertEqual(result.code, 0, result.err)
        content = path.read_bytes()
        path.unlink()
        return content, result

    def test_mixed_ranks_give_the_same_bytes(self):
        expected, _ = self.dump("--devices", "none")
        for devices, ranks in (("emulated,cpu", 3), ("cpu,emulated,emulated", 4)):
            with self.subTest(devices=devices):
                content, result = self.dump("--devices", devices, ranks=ranks)
                self.assertEqual(content, expected)
                self.assertIn("GPU 0 (emulated device)", result.err)

    def test_both_transports_give_the_same_bytes(self):
        expected, _ = self.dump("--devices", "none")
        device = "emulated:mpi=cuda"
        for devices, ranks in ((device, 2), (f"{device},cpu", 3), (f"{device},{device}", 3)):
            for transport, says in ((["--transport", "staged"], "staged \\(as asked\\)"),
                                    (["--transport", "cuda-aware"], "cuda-aware \\(.*the self-test passed\\)"),
                                    ([], "cuda-aware \\(.*the self-test passed\\)")):
                with self.subTest(devices=devices, transport=transport):
                    content, result = self.dump("--devices", devices, *transport, ranks=ranks)
                    self.assertEqual(content, expected)
                    self.assertRegex(result.err, says)
        # Steps of so many rows that two calls are on their way at once, and experts that do not all fit.
        more = {"ids": ",".join(str(number % 50) for number in range(90))}
        expected, _ = self.dump("--chunk", "40", "--devices", "none", **more)
        for memory, mca in (([], OB1), ([], UCX), (["--expert-memory", "700K"], OB1)):
            with self.subTest(memory=memory, mca=mca):
                content, _ = self.dump("--chunk", "40", "--devices", f"{device},cpu", *memory, ranks=3, mca=mca, **more)
                self.assertEqual(content, expected)

    def test_in_one_process_and_chunk_by_chunk(self):
        expected, _ = self.dump("--devices", "none")
        self.assertEqual(self.dump("--devices", "emulated", "--chunk", "3")[0], expected)

    def test_little_memory_gives_the_same_bytes(self):
        expected, _ = self.dump("--devices", "none", "--chunk", "4")
        content, result = self.dump("--devices", "emulated,cpu", "--chunk", "4", "--expert-memory", "600K", ranks=3)
        self.assertEqual(content, expected)
        plan = self.job("--devices", "emulated,cpu", "--chunk", "4", "--expert-memory", "600K", "--dry-run", ranks=3)
        self.assertRegex(plan.err, r"rank 1 on .*: (\d|[123]\d) of 46 experts \(.* MiB of .* MiB\) stay on the GPU, "
                                   r"0 in pinned host memory, the others are read on demand")

    def test_the_start_line_says_what_computes_and_how_messages_go(self):
        result = self.job("--devices", "emulated,cpu", "--dry-run", ranks=3)
        self.assertEqual(result.code, 0, result.err)
        line = next(line for line in result.err.splitlines() if line.startswith("dsv41-mpi 0"))
        self.assertRegex(line, r"rank 1 staged \(.+\); rank 2 staged \(no GPU on this rank\)")
        self.assertRegex(line, r"experts on rank 1 GPU 0 \(emulated device\); rank 2 \w+, \d+ thread")
        self.assertRegex(result.err, r"rank 1 on .*GPU 0 \(emulated device\): 46 of 46 experts .* stay on the GPU")
        self.assertIn("staged (as asked)", self.job("--transport", "staged", "--dry-run", ranks=2).err)
        self.assertRegex(self.job("--devices", "emulated:mpi=cuda,emulated", "--dry-run", ranks=3).err,
                         r"rank 1 cuda-aware \(by mpi=cuda in --devices .+ supports CUDA and the self-test passed\); "
                         r"rank 2 staged \(.+ has no CUDA support\)")
        self.assertIn("staged (a single process sends no messages)",
                      self.job("--devices", "emulated:mpi=cuda", "--dry-run").err)

    def test_real_gpus_give_the_same_bytes(self):
        if self.without_gpu():
            self.skipTest("no GPU on this machine, or a build without CUDA")
        expected, _ = self.dump("--devices", "none", "--chunk", "4")
        for arguments, ranks in ((["0"], 0), (["0"], 2), (["0,cpu"], 3), (["0", "--share-gpu"], 3), (["0,emulated"], 3),
                                 (["0,cpu", "--expert-memory", "600K"], 3)):
            with self.subTest(arguments=arguments, ranks=ranks):
                content, result = self.dump("--chunk", "4", "--devices", *arguments, ranks=ranks)
                self.assertEqual(content, expected)
                self.assertRegex(result.err, r"GPU 0 \((?!emulated)")

    def refused(self, code, *words, arguments, ranks):
        for more in ([], ["--dry-run"]):
            with self.subTest(arguments=arguments, more=more):
                result = self.job(*arguments, *more, ranks=ranks)
                self.assertEqual(result.code, code, result.err)
                self.assertEqual(result.out, "")
                self.assertEqual(len(result.messages()), 1, result.err)
                for word in words:
                    self.assertIn(word, result.messages()[0])
                self.assertLess(result.seconds, 15 * PATIENCE)

    def test_what_cannot_be_had_is_refused_before_loading(self):
        self.refused(4, "rank 1 (", "GPU 99", arguments=["--devices", "99"], ranks=2) if self.without_gpu() else None
        self.refused(2, "rank 1 (", "3 expert ranks on this machine and 2 entries of --devices", "--share-gpu",
                     arguments=["--devices", "emulated,cpu"], ranks=4)
        self.refused(4, "rank 1 (", "0.01 MiB of GPU memory are not enough", "520 rows per step",
                     arguments=["--devices", "emulated:memory=10000"], ranks=2)
        self.refused(4, "rank 1 (", "--expert-memory asks for 2.00 GiB of GPU memory, 1.00 GiB are free",
                     arguments=["--devices", "emulated", "--expert-memory", "2G"], ranks=2)
        self.refused(4, "--transport cuda-aware", "no rank computes on a GPU",
                     arguments=["--devices", "none", "--transport", "cuda-aware"], ranks=2)
        self.refused(4, "rank 1 (", "--transport cuda-aware", "has no CUDA support; use --transport staged",
                     arguments=["--devices", "emulated", "--transport", "cuda-aware"], ranks=2)
        self.refused(4, "--transport cuda-aware: a single process sends no messages; use --transport staged",
                     arguments=["--devices", "emulated:mpi=cuda", "--transport", "cuda-aware"], ranks=0)
        self.refused(2, "--devices takes", arguments=["--devices", "0,x"], ranks=2)
        self.refused(2, "--transport fast", arguments=["--transport", "fast"], ranks=2)

    def without_gpu(self):
        return "no GPU:" in self.job("--dry-run").err

    def test_a_device_that_dies_or_hangs_ends_the_job(self):
        for device, cause, options in (("emulated:fail=20", "the launch was told to fail", []),
                                       ("emulated:mpi=cuda:fail=20", "the launch was told to fail", []),
                                       ("emulated:hang=20", "GPU 0 (emulated device) hangs", ["--rank-timeout", "3"]),
                                       ("emulated:mpi=cuda:hang=20", "GPU 0 (emulated device) hangs", ["--rank-timeout", "3"]),
                                       ("emulated:hang_copy=3", "hangs: it has not finished an upload for 3 s", ["--rank-timeout", "3"]),
                                       ("emulated:hang_copy=50", "hangs: it has not finished an upload for 3 s",
                                        ["--rank-timeout", "3", "--expert-memory", "300K", "--chunk", "4"])):
            with self.subTest(device=device):
                result = self.job("--devices", f"cpu,{device}", *options, ranks=3)
                self.assertEqual(result.code, 4, result.err)
                # Beside how far loading is.
                messages = [line for line in result.messages() if not line.startswith("dsv41-mpi: experts ")]
                self.assertEqual(len(messages), 1, result.err)
                self.assertRegex(messages[0], r"rank 2 \(.+\): ")
                self.assertIn(cause, messages[0])
                self.assertRegex(messages[0], r"block \d+, step \d+\)$")
                self.assertLess(result.seconds, 30 * PATIENCE)

    def test_the_transport_self_test_is_a_program_of_its_own(self):
        # It starts MPI, without a launcher: see support/sanitizer_defaults.cc.
        self.assertEqual(run(["--transport-self-test", "emulated"], ASAN_OPTIONS="fast_unwind_on_malloc=0").code, 0)
        failed = run(["--transport-self-test", "99"], ASAN_OPTIONS="fast_unwind_on_malloc=0")
        self.assertEqual(failed.code, 4)
        self.assertEqual(len(failed.err.splitlines()), 1, failed.err)


if __name__ == "__main__":
    unittest.main()
