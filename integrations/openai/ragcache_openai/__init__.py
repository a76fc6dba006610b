"""The part of OpenAI's API that keeps something on the server: responses, conversations, files and vector stores."""
