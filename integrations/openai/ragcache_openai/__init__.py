"""The part of OpenAI's API that keeps something on the server: responses, files and vector stores."""
