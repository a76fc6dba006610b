"""Whether an event loop goes on while something is awaited."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Ticks:
    """count: turns that another task had while the block ran. A call that blocks the loop leaves it none or one."""

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
