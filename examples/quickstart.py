"""A store, a question, an answer. Run it twice: the second time nothing is read again.

python examples/quickstart.py      # keeps its store in quickstart-kb, in the current folder
"""

from pathlib import Path

import ragcache as rc

with rc.RagCache.open("quickstart-kb") as kb:
    report = kb.ingest([Path(__file__).parent / "corpus"])
    print(f"{len(report.added)} added, {len(report.unchanged)} unchanged; {report.computed_tokens} tokens read")
    answer = kb.ask("Which river flows past the town that is home to Petra Elley?", k=4)
    print(answer.text)
    for hit in answer.hits:
        print(f"  {hit.score:.2f} {hit.chunk.title} (KV from {hit.kv})")
    times, usage = answer.timings, answer.usage
    print(f"{usage.computed_tokens} of {usage.prompt_tokens} prompt tokens computed for this question")
    print(f"first token after {times.ttft_s:.3f} s: search {times.retrieve_s:.3f} s, blocks {times.load_s:.3f} s,")
    print(f"  placing {times.place_s:.3f} s, question {times.prefill_s:.3f} s")
