# SPDX-License-Identifier: Apache-2.0
"""What a run showed, as one dictionary and as text."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiohixl import doctor
from aiohixl.demo.transport import STAND_IN

__all__ = ["LOGITS_TOLERANCE", "failures", "of_model", "of_synthetic", "render"]

#: Largest difference of a logit that counts as the same. Logits here are of the order of 10.
LOGITS_TOLERANCE = 1e-3


def _unpack(packed: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(packed), dtype=np.float32)


def _largest_difference(one: str, other: str) -> float | None:
    """Largest absolute difference; None where a value is not finite, or the lengths differ."""
    a, b = _unpack(one), _unpack(other)
    if a.shape != b.shape:
        return None
    difference = float(np.abs(a - b).max())
    return difference if np.isfinite(difference) else None


def _transfer(prefill: dict[str, Any]) -> dict[str, Any]:
    seconds = prefill["transfer_seconds"]
    return {
        "transport": prefill["provider"],
        "link": prefill["link"],
        "library": prefill.get("library"),
        "stand_in": prefill.get("stand_in", False),
        "bytes_moved": prefill["nbytes"],
        "transfer_seconds": seconds,
        "gigabytes_per_second": prefill["nbytes"] / seconds / 1e9 if seconds else 0.0,
        "hidden_share": prefill["hidden_share"],
        "alone_seconds": prefill["alone_seconds"],
        "alone_gigabytes_per_second": prefill["nbytes"] / prefill["alone_seconds"] / 1e9,
        "prefill_compute_seconds": prefill["compute_seconds"],
        "exposed_seconds": max(prefill["landed_at"] - prefill["computed_at"], 0.0),
    }


def _arrival(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    """Whether what was sent is what lies there, byte for byte; both sides hashed their own memory.

    Equal tokens prove less: a flipped low bit does not change them, and keys
    carry their position, so that swapped blocks do not either.
    """
    sums = zip(prefill["checksums"], decode["checksums"], decode["checksums_again"], strict=True)
    differ = [layer for layer, (sent, streamed, again) in enumerate(sums) if not sent == streamed == again]
    return {
        "checksums_identical": not differ,
        "layers_that_differ": differ,
        "written_outside_blocks": decode["written_outside"],
    }


def of_model(expected: dict[str, Any], prefill: dict[str, Any], decode: dict[str, Any], threads: int) -> dict[str, Any]:
    """The report of the demo on the model, from the results of its three workers."""
    same_steps = _largest_difference(expected["logits"], decode["logits"])
    one_forward = _largest_difference(expected["one_forward_logits"], decode["logits"])
    return {
        "demo": "SmolLM2-135M-Instruct",
        "tokens_identical": decode["tokens"] == expected["tokens"],
        "logits_max_difference": same_steps,
        "logits_max_difference_to_one_forward": one_forward,
        "logits_tolerance": LOGITS_TOLERANCE,
        **_arrival(prefill, decode),
        "prompt_tokens": len(expected["prompt"]),
        "text": decode["text"],
        "tokens": decode["tokens"],
        "reference_tokens": expected["tokens"],
        "layers": prefill["layers"],
        **_transfer(prefill),
        "ttft_monolithic_seconds": expected["ttft"],
        "ttft_split_seconds": decode["ttft"],
        "ttft_split_parts": {
            "request": prefill["started_at"] - decode["asked_at"],
            "prefill": prefill["computed_at"] - prefill["started_at"],
            "rest_of_transfer_and_note": decode["noted_at"] - prefill["computed_at"],
            "first_step": decode["first_token_at"] - decode["noted_at"],
        },
        "torch_threads": threads,
        "machine": doctor.machine(),
    }


def of_synthetic(prefill: dict[str, Any], decode: dict[str, Any], total: float) -> dict[str, Any]:
    """The report of the demo without a model."""
    return {
        "demo": "synthetic, Llama-2-7B shape",
        **_arrival(prefill, decode),
        "shape": prefill["shape"],
        **_transfer(prefill),
        "request_to_note_seconds": decode["noted_at"] - decode["asked_at"],
        "total_seconds": total,
        "machine": doctor.machine(),
    }


def failures(report: dict[str, Any]) -> list[str]:
    """What is wrong with a run, one line each; empty when all is as it should be."""
    wrong = []
    if not report.get("tokens_identical", True):
        wrong.append(f"token ids differ: {report['tokens']} where the reference has {report['reference_tokens']}")
    for key, what in (
        ("logits_max_difference", "the same steps in one process"),
        ("logits_max_difference_to_one_forward", "one forward pass"),
    ):
        if key in report:
            difference = report[key]
            if difference is None:
                wrong.append(f"first logits are not comparable with those of {what}")
            elif difference > report["logits_tolerance"]:
                wrong.append(f"first logits differ by {difference:.2g} from {what}")
    if not report["checksums_identical"]:
        wrong.append(f"checksums differ in layers {report['layers_that_differ']}")
    if report["written_outside_blocks"]:
        wrong.append(f"blocks nobody offered were written to: {report['written_outside_blocks']}")
    return wrong


def _transfer_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        *_carrier_rows(report),
        ("bytes moved", f"{report['bytes_moved'] / 1e6:.1f} MB"),
        ("transfer time", f"{report['transfer_seconds'] * 1e3:.1f} ms in flight"),
        ("rate", f"{report['gigabytes_per_second']:.2f} GB/s, sharing the cores with the computation"),
        ("hidden behind compute", f"{report['hidden_share']:.1%} of the transfer time"),
        (
            "same bytes, cores idle",
            f"{report['alone_seconds'] * 1e3:.1f} ms, {report['alone_gigabytes_per_second']:.2f} GB/s",
        ),
        ("left after compute", f"{report['exposed_seconds'] * 1e3:.1f} ms until the note was delivered"),
    ]


def _model_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    parts = report["ttft_split_parts"]
    return [
        ("prompt", f"{report['prompt_tokens']} tokens, {report['layers']} layers"),
        *_transfer_rows(report),
        ("first token, one process", f"{report['ttft_monolithic_seconds'] * 1e3:.0f} ms"),
        ("first token, split", f"{report['ttft_split_seconds'] * 1e3:.0f} ms"),
        ("  request", f"{parts['request'] * 1e3:.1f} ms"),
        ("  prefill", f"{parts['prefill'] * 1e3:.0f} ms"),
        ("  rest of transfer, note", f"{parts['rest_of_transfer_and_note'] * 1e3:.1f} ms"),
        ("  first decode step", f"{parts['first_step'] * 1e3:.0f} ms"),
        ("cache, byte for byte", _same(report["checksums_identical"])),
        ("token ids", _same(report["tokens_identical"])),
        ("first logits", f"max difference {_number(report['logits_max_difference'])}"),
        ("  against one forward pass", _number(report["logits_max_difference_to_one_forward"])),
    ]


def _carrier_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    if report["library"] is None:
        return [("transport", report["transport"])]
    rows = [("transport", f"{report['transport']}, link {report['link']}"), ("HIXL", report["library"])]
    return [*rows, ("NPU", f"none: {STAND_IN}")] if report["stand_in"] else rows


def _same(identical: bool) -> str:
    return "identical" if identical else "DIFFERENT"


def _number(value: float | None) -> str:
    return "not comparable" if value is None else f"{value:.2g}"


def render(report: dict[str, Any]) -> str:
    """The text and the table, for people."""
    if "tokens" in report:
        head = [report["text"], ""]
        rows = _model_rows(report)
    else:
        shape = report["shape"]
        head = []
        rows = [
            ("cache", f"{shape['layers']} layers, {shape['heads']} heads of {shape['head_dim']}, float16"),
            ("tokens", f"{shape['tokens']} in blocks of {shape['block_size']}"),
            *_transfer_rows(report),
            ("request to note", f"{report['request_to_note_seconds'] * 1e3:.1f} ms"),
            ("whole demo", f"{report['total_seconds']:.1f} s"),
            ("checksums", _same(report["checksums_identical"])),
        ]
    machine = report["machine"]
    rows.append(
        (
            "machine",
            f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}, Linux {machine['kernel']}",
        )
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join([*head, *(f"{name:<{width}}  {value}" for name, value in rows)])
