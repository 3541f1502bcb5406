# SPDX-License-Identifier: Apache-2.0
"""The demo's prompt: varied on purpose.

Repetitive text makes cache blocks nearly equal, so that wrong blocks could
still decode to the right words. This one mixes prose, numbers, names, a table,
code and questions, and is more than 512 tokens long.
"""

from __future__ import annotations

__all__ = ["PROMPT", "chat"]

PROMPT = """\
Here is the maintenance report of the tide mill at Carrow Point. Read it, then answer the question at \
the end.

## 1. What happened
On Tuesday 14 March at 04:52 the east sluice gate stopped 31 cm above its sill. The night keeper, \
Ottilie Brandvold, heard "a noise like gravel in a kettle" and closed the main valve by hand. Water in \
the upper pond fell from 3.80 m to 2.15 m before the gate was wedged with two oak beams. Nobody was \
hurt, but nineteen sacks of barley flour got wet and were sold to a pig farmer for 7 crowns each.

## 2. Measurements
| hour  | pond (m) | wheel (rpm) | oil (deg C) | remark               |
|-------|----------|-------------|-------------|----------------------|
| 03:00 | 3.80     | 11.4        | 41          | normal               |
| 04:00 | 3.77     | 11.9        | 58          | bearing warm         |
| 05:00 | 2.61     | 0.0         | 73          | gate jammed          |
| 06:00 | 2.15     | 0.0         | 49          | beams in place       |

The log writer in the pump house runs this small programme, which Idris Okonjo-Vale wrote in 2019:

```python
def alarm(samples, limit=60.0):
    hot = [t for t, celsius in samples if celsius > limit]
    return f"{len(hot)} hot samples, first at {hot[0]}" if hot else None
```

It sends its messages to the bakery, because the bakery is the only house awake at that hour. The baker, \
Fenwick Osei, thought that the paper slip was an order for sixty loaves and baked them.

## 3. Cause
The lower bearing had been greased with lard instead of graphite paste. Lard melts at about 40 degrees; \
at 58 degrees it ran out along the shaft, picked up sand, and ground a groove 4 mm deep into the bronze. \
An eel of remarkable size was also found in the gearbox, alive, although Professor Quillan of the \
harbour school doubts that it played any part.

## 4. Orders placed
1. One bronze bearing, bore 182 mm, from the foundry in Hallmere (84 crowns, six weeks).
2. Twelve tins of graphite paste, and a lock for the cupboard in which the lard is kept.
3. A bell for the keeper's room, so that warnings no longer go to the bakery.
4. A bucket with a lid, for the eel.

## 5. Open questions
Who signed for the lard on 2 February? Why did the thermometer in the wheel house show 12 degrees all \
winter? Should the miller pay Fenwick Osei for the loaves, most of which were eaten by the people who \
came to look at the gate?

Question: Explain in a few plain sentences why the gate jammed, and what the mill has ordered so that it \
does not happen again."""


def chat(text: str) -> str:
    """Wrap a user's message the way the model was trained to read it (ChatML)."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
