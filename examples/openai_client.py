"""The official OpenAI client over a ragcache server.

ragcache ingest examples/corpus --store kb
ragcache serve --store kb
OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/openai_client.py
"""

from openai import OpenAI

client = OpenAI()  # address and key from the environment
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Which club does Jonas Lansen belong to?"}]

answer = client.chat.completions.create(model=model, messages=question, extra_body={"ragcache": {"k": 4}})
print(answer.choices[0].message.content)
print(f"{answer.usage.prompt_tokens_details.cached_tokens} of {answer.usage.prompt_tokens} tokens came from the cache")
for source in answer.ragcache["sources"]:
    print(f"  {source['score']:.2f} {source['title']} (KV from {source['kv']})")

for chunk in client.chat.completions.create(model=model, messages=question, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

given = {"documents": [{"text": "Mira Bruno plays for the Chess Club Maple."}]}  # instead of the store's documents
question = [{"role": "user", "content": "Which club does Mira Bruno belong to?"}]
answer = client.chat.completions.create(model=model, messages=question, extra_body={"ragcache": given})
print(answer.choices[0].message.content)
