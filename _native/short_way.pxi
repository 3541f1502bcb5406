# SPDX-License-Identifier: Apache-2.0
"""From `peer.write` to the native post and back to `await` without a line of Python, where nothing is special.

What is special goes the long way (`aiohixl.remote`, `aiohixl.transfer`), which decides and explains. Nothing raises
for a caller's mistake.
"""
from cpython.contextvars cimport get_value
from cpython.exc cimport PyErr_SetObject
from cpython.object cimport PyObject, PyTypeObject

cdef extern from *:
    """
    static void make_iterator(PyObject *type, PyObject *(*next)(PyObject *))
    {
        ((PyTypeObject *)type)->tp_iter = PyObject_SelfIter;
        ((PyTypeObject *)type)->tp_iternext = next;
        PyType_Modified((PyTypeObject *)type);
    }
    """
    void make_iterator(object type, PyObject *(*next)(PyObject *) noexcept)

cdef tuple NO_ARGUMENTS = ()


cdef class QueueState:
    """Numbers of transfers; and how many awaits in a row had nothing to wait for: one in many gives others a turn."""

    cdef uint64_t last_token
    cdef int turn
    cdef int awaits_per_turn

    def __init__(self, int awaits_per_turn):
        self.awaits_per_turn = awaits_per_turn

    cpdef uint64_t new_token(self):
        """Of this queue, from 1. Any thread."""
        self.last_token += 1
        return self.last_token

    cpdef bint take_turn(self):
        """True when an await that need not wait should let others run first."""
        self.turn += 1
        if self.turn < self.awaits_per_turn:
            return False
        self.turn = 0
        return True


@cython.final
@cython.freelist(16)
cdef class Answer:
    """What an await steps through that has nothing to wait for: the first step is the last."""

    cdef object value


cdef PyObject *answer(PyObject *self) noexcept:
    PyErr_SetObject(StopIteration, (<Answer>self).value)
    return NULL


# Not `__next__`: what that raises, Cython adds to a traceback that nobody reads, which takes longer than all the rest.
make_iterator(Answer, &answer)


cdef class Extent:
    """`nbytes` bytes from `offset` of a region: a `Span`, which sees to it that they are inside."""

    cdef public object target
    cdef public uint64_t offset, nbytes


cdef class TransferState:
    """What is known of a transfer; `aiohixl.transfer` says what it means, and has the rest of the class."""

    cdef object __weakref__
    cdef readonly QueueState _queue
    cdef public object _drivers, _error, _origin, _quiescers, _unseen, _waiters
    cdef public object elapsed, keep, kind, nbytes
    cdef public uint64_t _handle, token
    cdef public bint _cancelling, _done, _observed, quiesced

    def __init__(self, origin, QueueState queue not None, uint64_t token, kind, nbytes, keep):
        self._origin = origin
        self._queue = queue
        self.token = token
        self.kind = kind
        self.nbytes = nbytes
        self.keep = keep

    def __await__(self):
        cdef QueueState turns = self._queue
        if turns is None or not self._done or self._error is not None or turns.turn + 1 >= turns.awaits_per_turn:
            return self._await()
        turns.turn += 1
        answer = <Answer>Answer.__new__(Answer)
        answer.value = self
        return answer


@cython.final
cdef class Poster:
    """Posts one row without a note, in no scope.

    `post` answers the transfer; None when it is not that, or the native side does not take it, with nothing changed.
    """

    cdef object scopes, parked, remote, transfer, moment, held
    cdef QueueState queue
    cdef dict sinks
    cdef Endpoint endpoint

    def __init__(self, Endpoint endpoint not None, QueueState queue not None, scopes, parked, remote, transfer, moment,
                 held):
        if not issubclass(transfer, TransferState):
            raise TypeError("transfers are made of TransferState")
        self.endpoint = endpoint
        self.queue = queue
        self.scopes = scopes  # their context variable
        self.parked = parked
        self.remote = remote
        self.transfer = transfer
        self.moment = moment  # of an NPU's work: (event's handle, event)
        self.held = held  # memory with an event
        self.sinks = queue.sinks

    cdef TransferState made(self, origin, kind, nbytes):
        cdef PyTypeObject *cls = <PyTypeObject *>self.transfer
        made = <TransferState>cls.tp_new(<type>self.transfer, <PyObject *>NO_ARGUMENTS, NULL)
        made._origin = origin
        made._queue = self.queue
        made.token = self.queue.new_token()
        made.kind = kind
        made.nbytes = nbytes
        return made

    def post(self, origin, uint32_t kind, name, local, remote, after):
        cdef object keep = local, target = remote, near = local, far, event
        cdef uint64_t lo = 0, ro = 0, nbytes, there, rkey, handle = 0, index
        cdef uintptr_t waits = 0
        cdef hx.hx_bool done = False
        cdef hx.hx_segment_t seg
        cdef hx.hx_post_t post
        cdef TransferState made
        cdef Region region
        if self.parked or get_value(self.scopes):
            return None
        try:
            if isinstance(local, Extent):
                near = (<Extent>local).target
                lo = (<Extent>local).offset
                nbytes = (<Extent>local).nbytes
            else:
                nbytes = local.nbytes
            if isinstance(remote, Extent):
                target = (<Extent>remote).target
                ro = (<Extent>remote).offset
                there = (<Extent>remote).nbytes
            else:
                there = remote.nbytes
            if not isinstance(near, Region) or type(target) is not self.remote or nbytes != there:
                return None
            far = target.handle
            rkey = target.rkey
        except (AttributeError, OverflowError, TypeError):  # no regions, or somebody has written to what is read here
            return None
        region = <Region>near
        if region._quarantine or not isinstance(far, RemoteRegion) or (kind == hx.HX_READ and region.readonly):
            return None
        if after is not None or region.device != "cpu":
            waits, event = self.moment(after, region.device)
            if waits:
                keep = self.held(local, event)
        made = self.made(origin, name, nbytes)
        seg.local = region.region
        seg.remote = (<RemoteRegion>far).rregion
        seg.rkey = rkey
        seg.local_off = &lo
        seg.remote_off = &ro
        seg.nbytes = NULL
        seg.each = nbytes
        seg.n = 1
        memset(&post, 0, sizeof(post))
        post.kind = kind
        post.token = made.token
        post.epoch = hx.HX_EPOCH_NOW
        post.segments = &seg
        post.nsegments = 1
        post.after = <void *>waits
        # Bounded: the checks and at most inline_limit bytes of copy. Releasing the GIL would cost more; and it is what
        # keeps records from being taken, and interrupts from being served, before the transfer is known.
        if hx.hx_post(self.endpoint.ep, &post, &handle, &index, &done) != hx.HX_OK:
            return None
        if done:
            made._done = made.quiesced = True
            made.elapsed = handle * 1e-9
        else:
            made._handle = handle
            made.keep = keep
            self.sinks[made.token] = made
        return made
