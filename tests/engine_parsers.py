"""An engine's own parser reads commands; ``python tests/engine_parsers.py vllm|sglang``.

It runs in a Python that has the engine, without this package: argument lists as JSON on stdin, and
on stdout for each one what was parsed, or the error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from typing import Any


def parser_of(engine: str) -> argparse.ArgumentParser:
    """vLLM 0.33's of ``vllm serve``, or SGLang 0.5.23's of ``sglang.launch_server``."""
    if engine == "vllm":
        from vllm.entrypoints.common.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        return make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-any-return]
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def parsed(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any]:
    """The plain values of the arguments; ``error`` where the parser refuses them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = vars(parser.parse_args(words))
    except SystemExit:
        return {"error": said.getvalue().strip().splitlines()[-1]}
    plain = (str, int, float, bool, type(None))
    told = ("speculative_config",)
    return {key: value for key, value in found.items() if isinstance(value, plain) or key in told}


def main() -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with contextlib.redirect_stdout(sys.stderr):
        parser = parser_of(sys.argv[1])
        found = [parsed(parser, words) for words in json.load(sys.stdin)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
