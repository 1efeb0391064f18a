"""`python -m campaign.fuzzing.libfuzzer TARGET [libFuzzer's own arguments]`: give a target inputs
that cover more code.

https://llvm.org/docs/LibFuzzer.html, https://github.com/google/atheris
"""

import sys

import atheris

with atheris.instrument_imports(include=["shardcache", "shardcache_client"]):
    from campaign.fuzzing.fuzz_targets import TARGETS


def main() -> None:
    """Run until libFuzzer's limits are reached, or something breaks; never returns."""
    target = TARGETS[sys.argv.pop(1)]

    def change(data: bytes, max_bytes: int, seed: int) -> bytes:
        assert target.mutate is not None
        return target.mutate(data, max_bytes, seed, atheris.Mutate)

    atheris.Setup(sys.argv, target.check, **({"custom_mutator": change} if target.mutate else {}))
    atheris.Fuzz()


main()
