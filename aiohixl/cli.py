# SPDX-License-Identifier: Apache-2.0
"""The command ``aiohixl``: doctor, demo, rendezvous, probe.

Exit codes: 0 all well; 1 it did not work; 2 wrong usage, or packages missing;
130 and 143 stopped by ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohixl import __version__
from aiohixl.advice import ASSUMED_TFLOPS, BUILT_IN, KV_DTYPES
from aiohixl.demo.loops import Stopped, run_async
from aiohixl.errors import ConfigError, HixlError, RendezvousError

__all__ = ["main"]

#: Environment variable for the rendezvous' token; read here and nowhere else.
TOKEN_VARIABLE = "AIOHIXL_TOKEN"
#: The same for the secret that engines share.
SECRET_VARIABLE = "AIOHIXL_SECRET"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535, 0 for any free one")
    return int(text)


def _count(text: str) -> int:
    value = int(text)
    # The model was trained for 8,192 tokens; the prompt takes about 750.
    if not 1 <= value <= 4096:
        raise argparse.ArgumentTypeError(f"{value} is not a number of tokens from 1 to 4096")
    return value


def _number(low: float, high: float, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse


def _doctor(options: argparse.Namespace) -> int:
    from aiohixl import doctor

    found = doctor.examine()
    print(json.dumps(found, indent=2) if options.json else doctor.render(found))
    return 0 if found["ok"] else 1


def _demo(options: argparse.Namespace) -> int:
    from aiohixl.demo import needs, report, run
    from aiohixl.demo.transport import Carrier

    if options.hixl_library is not None and options.transport != "hixl":
        _say("aiohixl demo: --hixl-library goes with --transport hixl")
        return 2
    carrier = Carrier(options.transport, options.hixl_library)
    if not options.synthetic and (absent := needs.missing()):
        _say(needs.how_to_install(absent))
        return 2
    try:
        if options.synthetic:
            result = run_async(run.run_synthetic(_say, carrier))
        else:
            result = run_async(run.run_model(options.tokens, _say, carrier))
    except run.ChildError as exc:
        if exc.traceback:
            _say(exc.traceback.rstrip())
        _say(f"aiohixl demo: {exc}")
        if options.json:
            print(json.dumps({"ok": False, "error": str(exc)}))
        return 1
    wrong = report.failures(result)
    if options.json:
        print(json.dumps({"ok": not wrong, "failures": wrong, **result}))
    else:
        print(f"\n{report.render(result)}")
    for line in wrong:
        _say(f"aiohixl demo: {line}")
    return 1 if wrong else 0


def _token(options: argparse.Namespace) -> str | None:
    return _hidden("token", options.token, options.token_file, TOKEN_VARIABLE)


def _hidden(what: str, value: str | None, file: str | None, variable: str) -> str | None:
    """From the option, the file or the environment, in this order."""
    if value is not None:
        return value
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"cannot read the {what} from {file}: {exc}") from exc
    return os.environ.get(variable) or None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _rendezvous(options: argparse.Namespace) -> int:
    from aiohixl.rendezvous import serve

    def on_ready(url: str) -> None:
        print(f"rendezvous listening on {url}", flush=True)

    try:
        token = _token(options)
        if token is None and not _is_loopback(options.host):
            _say(
                f"aiohixl rendezvous: warning: anybody who reaches {options.host} can join without a token; "
                f"set {TOKEN_VARIABLE} or give --token-file"
            )
        run_async(serve(options.host, options.port, token, on_ready))
    except Stopped:
        # Being told to stop is how a server ends well.
        return 0
    except (ConfigError, RendezvousError) as exc:
        _say(f"aiohixl rendezvous: {exc}")
        return 1
    return 0


def _probe(options: argparse.Namespace) -> int:
    from aiohixl import probe_command
    from aiohixl.advice import load_model

    try:
        # Before anybody is disturbed.
        model = None if options.model is None else load_model(options.model, options.kv_dtype)
        asked = probe_command.Asked(
            peer=options.peer,
            rendezvous=options.rendezvous,
            token=_token(options),
            secret=_hidden("secret", options.secret, options.secret_file, SECRET_VARIABLE),
            transport=options.transport,
            seconds=options.seconds,
        )
    except ConfigError as exc:
        _say(f"aiohixl probe: {exc}")
        return 2
    try:
        result = run_async(probe_command.measure(asked))
    except HixlError as exc:
        _say(f"aiohixl probe: {exc}")
        if options.json:
            print(json.dumps({"ok": False, "error": str(exc)}))
        return 1
    report = probe_command.Report(result, model, options.tokens, options.tflops)
    print(json.dumps(report.as_dict()) if options.json else report.render())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aiohixl", description="One-sided transfer of KV caches for asyncio.")
    parser.add_argument("--version", action="version", version=f"aiohixl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, handler: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(handler=handler)
        return sub

    doctor = command("doctor", _doctor, "which providers work here, and the kernel limits that matter")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    demo = command("demo", _demo, "prefill in one process, decode in another, the same tokens")
    demo.add_argument("--synthetic", action="store_true", help="no model: a Llama-2-7B-shaped cache, checksums")
    demo.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    demo.add_argument(
        "--tokens", type=_count, default=32, metavar="N", help="tokens to generate (default: %(default)s)"
    )
    demo.add_argument(
        "--transport", choices=("shm", "hixl"), default="shm", help="what carries the cache (default: %(default)s)"
    )
    demo.add_argument(
        "--hixl-library",
        metavar="DIR",
        help="where libcann_hixl.so is; default ASCEND_HOME_PATH/lib64 and the loader's path",
    )

    rendezvous = command("rendezvous", _rendezvous, "run the HTTP rendezvous where engines find each other")
    rendezvous.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    rendezvous.add_argument("--port", type=_port, default=7700, help="port; 0 takes a free one (default: %(default)s)")
    _add_hidden(rendezvous, "token", "bearer token that engines must show", TOKEN_VARIABLE)

    probe = command("probe", _probe, "measure the path to an engine, and say what a model's KV cache costs on it")
    _add_probe_options(probe)
    return parser


def _add_hidden(command: Any, what: str, text: str, variable: str) -> None:
    group = command.add_mutually_exclusive_group()
    group.add_argument(f"--{what}", help=f"{text}; other users can see it in ps")
    group.add_argument(f"--{what}-file", metavar="FILE", help=f"read it from a file (or set {variable})")


def _add_probe_options(probe: argparse.ArgumentParser) -> None:
    probe.add_argument("peer", metavar="PEER", help="its name, with --rendezvous; or its address (Engine.address)")
    probe.add_argument("--rendezvous", metavar="URL", help="where the engines find each other")
    _add_hidden(probe, "token", "bearer token of the rendezvous", TOKEN_VARIABLE)
    _add_hidden(probe, "secret", "the secret that the engines share", SECRET_VARIABLE)
    probe.add_argument(
        "--transport", choices=("auto", "shm", "tcp"), default="auto", help="insist on one (default: %(default)s)"
    )
    probe.add_argument(
        "--seconds", type=_number(0.1, 60), default=2.0, metavar="S", help="time to measure (default: %(default)s)"
    )
    probe.add_argument(
        "--model",
        metavar="MODEL",
        help=f"what its KV cache costs on the path: {', '.join(BUILT_IN)}, or a Hugging Face config.json",
    )
    probe.add_argument(
        "--tokens", type=_number(1, 1e9, int), default=4096, metavar="N", help="of the cache (default: %(default)s)"
    )
    probe.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), help="of the cache; default what the model says")
    probe.add_argument(
        "--tflops",
        type=_number(1e-6, 1e9),
        default=ASSUMED_TFLOPS,
        metavar="T",
        help="what computing the cache again reaches, an assumption (default: %(default)s)",
    )
    probe.add_argument("--json", action="store_true", help="print one JSON object: seconds, bytes, bytes per second")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        code = int(options.handler(options))
        sys.stdout.flush()
        return code
    except Stopped as exc:
        return 128 + int(exc.args[0])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our stdout has gone (`aiohixl doctor | head`); nothing else may be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
