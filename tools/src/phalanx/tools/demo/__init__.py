"""`phalanx demo`: ranks train a small tensor-parallel transformer, which is compared with one process.

Read it as an example of the library's use, in this order:

    model.py       the transformer: ordinary modules, which know nothing about ranks
    parallel.py    how it is sharded over the ranks
    train.py       the training loop of one rank
    compiled.py    the model as one compiled graph, for --compile
    reference.py   the same model in one process, and the comparison with it
    costs.py       what each collective costs, with Phalanx and with gloo
    launch.py      starts the ranks, and ends them; rank.py is what they run
"""

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run the demo.

    Args:
        argv: Arguments after the command's name.

    Returns:
        Exit status: 0 if all went well and the ranks agreed with one process.
    """
    from phalanx.tools.demo.options import parse

    options = parse(argv)
    from phalanx.tools.demo.launch import launch

    return launch(options)
