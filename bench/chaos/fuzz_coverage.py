"""Fuzz one decoder with libFuzzer, in a process of its own, because libFuzzer never returns.

    python -m bench.chaos.fuzz_coverage TARGET CORPUS_DIR INPUTS SEED

`bench.chaos.fuzz --coverage` starts this program, once for each decoder.
"""

import sys

import atheris

with atheris.instrument_imports(include=["mage_async"]):
    from mage_async.config import config_file
    from tests.helpers.fuzzing.targets import targets

MAX_INPUT_BYTES = 8192
"""Largest input that libFuzzer makes."""
HANG_S = 10
"""Seconds of one input after which libFuzzer reports a hang."""
MEMORY_MIB = 1024
"""Memory of this process above which libFuzzer reports a fault."""


def main() -> None:
    """Feed inputs to the target until all inputs were tried, or one of them breaks it."""
    name, corpus, num_inputs, seed = sys.argv[1:]
    target = next(one for one in targets(config_file.find(None)) if one.name == name)
    options = [
        f"-runs={num_inputs}",
        f"-seed={int(seed) + 1}",  # libFuzzer takes 0 as "choose one at random"
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={MEMORY_MIB}",
        "-print_final_stats=1",
        f"-artifact_prefix={corpus}/",
    ]
    # libFuzzer wants None from its callback; `feed` returns whether the input was well-formed.
    atheris.Setup([sys.argv[0], *options, corpus], lambda data: target.feed(data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
