"""`python -m tpllama` is `tpllama`."""

from tpllama.cli import main

main()
