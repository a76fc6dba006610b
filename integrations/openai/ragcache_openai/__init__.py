"""The routes of OpenAI's API that keep objects on the server: responses, files and vector stores."""
