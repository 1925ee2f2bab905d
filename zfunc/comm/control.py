"""The control group: every rank of a mesh tells all others a few bytes.

A message has one fixed frame of 128 bytes, which holds the length and the first 120 bytes of the
payload; so a small payload takes one round. What does not fit follows in a second message, for
which the frames have told everyone the size.
"""

from __future__ import annotations

from typing import Any

import torch

from zfunc.comm.blame import Watch

__all__ = ["FRAME_BYTES", "Control"]

FRAME_BYTES = 128
_HEAD_BYTES = 8
_TAG = 1


class Control:
    """Blocking all-to-all exchange of bytes over one gloo backend.

    Attributes:
        count: calls so far.
    """

    def __init__(self, backend: Any, rank: int, size: int, watch: Watch):
        """Takes a connected backend.

        Args:
            backend: has `send` and `recv`, its ranks those of the mesh.
            rank: this rank.
            size: the number of ranks.
            watch: makes the errors of lost ranks.
        """
        self.count = 0
        self._backend = backend
        self._rank = rank
        self._peers = [(rank + step) % size for step in range(1, size)]
        self._watch = watch
        self._sent = bytearray(FRAME_BYTES)
        self._received = {peer: bytearray(FRAME_BYTES) for peer in self._peers}
        self._sent_tensor = _as_tensor(self._sent)
        self._received_tensors = {peer: _as_tensor(self._received[peer]) for peer in self._peers}

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gives every rank all payloads, in rank order.

        Raises:
            RankLostError: a rank died or did not call within the bound.
        """
        self._watch.check()
        self.count += 1
        room = FRAME_BYTES - _HEAD_BYTES
        self._sent[:_HEAD_BYTES] = len(payload).to_bytes(_HEAD_BYTES, "little")
        self._sent[_HEAD_BYTES : _HEAD_BYTES + min(len(payload), room)] = payload[:room]
        self._round(dict.fromkeys(self._peers, self._sent_tensor), self._received_tensors)
        lengths = {
            peer: int.from_bytes(frame[:_HEAD_BYTES], "little")
            for peer, frame in self._received.items()
        }
        answers = {
            peer: bytes(self._received[peer][_HEAD_BYTES : _HEAD_BYTES + min(lengths[peer], room)])
            for peer in self._peers
        }
        rests = {
            peer: bytearray(length - room) for peer, length in lengths.items() if length > room
        }
        if rests or len(payload) > room:
            mine = bytearray(payload[room:])
            self._round(
                dict.fromkeys(self._peers, _as_tensor(mine)) if mine else {},
                {peer: _as_tensor(rest) for peer, rest in rests.items()},
            )
        everyone = {peer: answers[peer] + bytes(rests.get(peer, b"")) for peer in self._peers}
        everyone[self._rank] = payload
        return [everyone[rank] for rank in sorted(everyone)]

    def _round(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        peer = self._rank
        works = []
        try:
            for peer, tensor in incoming.items():
                works.append((peer, self._backend.recv([tensor], peer, _TAG)))
            for peer, tensor in outgoing.items():
                works.append((peer, self._backend.send([tensor], peer, _TAG)))
            for peer, work in works:  # noqa: B007
                work.wait()
        except RuntimeError as error:
            raise self._watch.lost(
                peer, f"exchange {self.count - 1} of all ranks", error
            ) from error


def _as_tensor(memory: bytearray) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
