"""Whether an event loop goes on while a call is awaited."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Ticks:
    """Turns of another task while a block ran. A call that blocks the loop leaves at most a single turn."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.count += 1


@asynccontextmanager
async def ticking() -> AsyncIterator[Ticks]:
    ticks = Ticks()
    task = asyncio.create_task(ticks.run())
    await asyncio.sleep(0)
    try:
        yield ticks
    finally:
        task.cancel()
