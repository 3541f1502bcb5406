# SPDX-License-Identifier: Apache-2.0
"""The one exception for "the rendezvous understood and said no", on both sides of the wire."""

from __future__ import annotations

from aiohixl.errors import RendezvousError
from aiohixl.wire import ErrorBody, Holder

__all__ = ["RefusedError", "refuse"]


class RefusedError(RendezvousError):
    """The rendezvous refused. ``code`` is stable, ``field`` and ``holder`` are set where they apply.

    Codes: ``bad_field``, ``unauthorized``, ``not_found``, ``not_joined``, ``name_taken``,
    ``wrong_incarnation``, ``no_such_route``, ``method_not_allowed``, ``too_large``,
    ``bad_content_type``, ``too_slow``, ``bad_body``, ``full``, ``shutting_down``.
    """

    code: str = ""
    field: str | None = None
    holder: Holder | None = None

    def body(self) -> ErrorBody:
        return ErrorBody(code=self.code, message=str(self), field=self.field, holder=self.holder)


def refuse(
    status: int, code: str, message: str, *, field: str | None = None, holder: Holder | None = None
) -> RefusedError:
    error = RefusedError(message)
    error.status, error.code, error.field, error.holder = status, code, field, holder
    return error
