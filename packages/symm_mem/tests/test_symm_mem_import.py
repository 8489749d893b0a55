"""What an import of the package loads."""

import subprocess
import sys


def test_it_imports_neither_dynamo_nor_sympy():  # which takes seconds
    code = "import sys, phalanx.symm_mem; sys.exit(not {'torch._dynamo', 'sympy'}.isdisjoint(sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
