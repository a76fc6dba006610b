"""The bodies of requests and answers. A field's description is its documentation: it goes into /openapi.json."""
