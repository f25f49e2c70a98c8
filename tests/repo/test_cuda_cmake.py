"""Tests of which GPUs the kernels are built for: common/cmake/cuda.cmake, with a program in place of nvidia-smi, and
what ptx.cuh refuses."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CUDA_CMAKE = ROOT / "common" / "cmake" / "cuda.cmake"
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

# A project with a kernel, and nothing in it that has to be compiled.
PROJECT = f"""cmake_minimum_required(VERSION 3.25)
project(kernels LANGUAGES NONE)
set(COURSE_CUDA AUTO)
include("{CUDA_CMAKE}")
course_find_cuda()
"""

ARCHITECTURES = f"""include("{CUDA_CMAKE}")
course_find_gpus(usable too_old)
course_architectures("${{usable}}" architectures)
message("<${{architectures}}> <${{too_old}}>")
"""


class CudaTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def cmake(self, gpus, *arguments):
        """Runs cmake where nvidia-smi prints these lines; None: it fails, as without a driver."""
        program = self.folder / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        lines = "exit 9" if gpus is None else "".join(f"echo {gpu}\n" for gpu in gpus)
        program.write_text("#!/bin/sh\n" + lines, encoding="utf-8")
        program.chmod(0o755)
        environment = dict(os.environ, PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        for name in ("CUDAARCHS", "CUDACXX"):
            environment.pop(name, None)
        result = subprocess.run(["cmake", *arguments], env=environment, cwd=self.folder, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stdout)
        return result.stdout

    def architectures(self, gpus):
        script = self.folder / "architectures.cmake"
        script.write_text(ARCHITECTURES, encoding="utf-8")
        return self.cmake(gpus, "-P", str(script)).strip()

    def configure(self, gpus):
        kernels = self.folder / "stage7_kernels" / "kernels"
        kernels.mkdir(parents=True)
        (kernels / "kernel.cu").touch()
        (self.folder / "CMakeLists.txt").write_text(PROJECT, encoding="utf-8")
        output = self.cmake(gpus, "-B", "build", "-S", ".")
        self.assertNotIn("CUDA compiler", output)
        return output

    def test_each_kind_of_gpu_is_built_for(self):
        self.assertEqual(self.architectures(["9.0"]), "<90a> <>")
        self.assertEqual(self.architectures(["8.9", "8.9"]), "<89> <>")
        self.assertEqual(self.architectures(["8.0", "12.0", "10.0"]), "<80;120a;100a> <>")

    def test_a_gpu_that_is_too_old_is_not_built_for(self):
        self.assertEqual(self.architectures(["7.5"]), "<> <7.5>")
        self.assertEqual(self.architectures(["7.5", "9.0"]), "<90a> <7.5>")

    def test_no_gpu(self):
        self.assertEqual(self.architectures(None), "<> <>")
        self.assertEqual(self.architectures(["No devices were found"]), "<> <>")
        self.assertIn("no GPU here, so the kernels are left out", self.configure(None))

    def test_with_a_gpu_that_is_too_old_the_build_goes_on_without_kernels(self):
        output = self.configure(["7.5"])
        self.assertIn("the GPU here has compute capability 7.5 and the kernels need 8.0 or newer", output)

    @unittest.skipUnless(NVCC, "needs nvcc (the CUDA Toolkit)")
    def test_kernels_for_9_0_are_compiled_for_90a(self):
        source = self.folder / "empty.cu"
        source.write_text('#include "common/cuda/ptx.cuh"\n', encoding="utf-8")
        messages = {}
        for architecture in ("90", "90a", "80"):
            result = subprocess.run(
                [NVCC, "-std=c++20", f"-I{ROOT}", f"--generate-code=arch=compute_{architecture},code=sm_{architecture}",
                 "-cubin", "-o", str(self.folder / "empty.cubin"), str(source)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            messages[architecture] = result.stdout if result.returncode else ""
        self.assertIn("compiled for 90a", messages["90"])
        self.assertEqual((messages["90a"], messages["80"]), ("", ""))


if __name__ == "__main__":
    unittest.main()
