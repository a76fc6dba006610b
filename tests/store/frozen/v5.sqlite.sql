-- Version 5 of the schema as it was, with a document in it. Never to be changed: a new version gets a file of its own.

CREATE TABLE ragcache_counters (
    name TEXT NOT NULL,
    value BIGINT NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE ragcache_documents (
    id TEXT NOT NULL,
    source TEXT NOT NULL,
    title TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    metadata JSON NOT NULL,
    created_at DOUBLE NOT NULL,
    updated_at DOUBLE NOT NULL,
    file TEXT,
    PRIMARY KEY (id)
);

CREATE TABLE ragcache_garbage (
    handle TEXT NOT NULL,
    created_at DOUBLE NOT NULL,
    PRIMARY KEY (handle)
);

CREATE TABLE ragcache_properties (
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE ragcache_chunks (
    id TEXT NOT NULL,
    document_id TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids BLOB NOT NULL,
    num_tokens INTEGER NOT NULL,
    metadata JSON NOT NULL,
    embedding BLOB NOT NULL,
    vector_id BIGINT NOT NULL,
    handle TEXT,
    created_at DOUBLE NOT NULL,
    uses_left INTEGER DEFAULT '0' NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(document_id) REFERENCES ragcache_documents (id) ON DELETE CASCADE,
    UNIQUE (vector_id)
);

CREATE INDEX ix_ragcache_chunks_document_id ON ragcache_chunks (document_id);

CREATE INDEX ix_ragcache_chunks_handle ON ragcache_chunks (handle);

CREATE TABLE ragcache_neighbours (
    vector_id BIGINT NOT NULL,
    place INTEGER NOT NULL,
    neighbour BIGINT NOT NULL,
    score DOUBLE NOT NULL,
    PRIMARY KEY (vector_id, place)
);

CREATE INDEX ix_ragcache_neighbours_neighbour ON ragcache_neighbours (neighbour);

CREATE TABLE ragcache_windows (
    vector_id BIGINT NOT NULL,
    chunk BIGINT NOT NULL,
    embedding BLOB NOT NULL,
    PRIMARY KEY (vector_id),
    FOREIGN KEY(chunk) REFERENCES ragcache_chunks (vector_id) ON DELETE CASCADE
);

CREATE INDEX ix_ragcache_windows_chunk ON ragcache_windows (chunk);

INSERT INTO ragcache_properties VALUES ('schema_version', '5'), ('embedding_dim', '2'), ('embedder', '"minilm"');

INSERT INTO ragcache_counters VALUES ('generation', 3), ('vector_id', 7);

INSERT INTO ragcache_documents VALUES ('d', 'd.md', 'Title', 'f00', '{"year": 2024}', 1000.5, 2000.5, '');

INSERT INTO ragcache_chunks VALUES
    ('d.0', 'd', 0, 'text', X'0100000002000000', 2, '{"year": 2024, "page": 1}', X'0000803F000000C0', 7, 'h0', 2000.5, 0);

INSERT INTO ragcache_garbage VALUES ('h9', 2000.5);
