# SPDX-License-Identifier: Apache-2.0
"""A prompt computed in one process and answered by another.

`run` starts the processes (rendezvous, prefill, decode, and the
single-process reference); each role is a module that can be run with
``python -m``. `handoff` is the only place where the transfer happens.
Importing this package imports neither torch nor transformers.
"""
