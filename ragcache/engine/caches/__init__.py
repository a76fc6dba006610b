"""Caches of KV that earlier questions left, and the index that finds stored passages in prompts.

    cache           holds                            found by                         budget
    --------------  -------------------------------  -------------------------------  ----------------------------------
    PrefixCache     exact KV of prompts and answers  namespace, then token by token   prefix_bytes
    Prefixes        the owners of that KV            model, salt, method: they are    its PrefixCache's
                                                     the namespace
    StoredPrefixes  the same KV of plain text, on    a hash of generation, namespace  foreign_cache, with the passages
                    disk                             and all tokens so far            from elsewhere
    SharedPrefixes  contexts placed from blocks      salt, method, passages in order  half of prefix_bytes, lent by the
                                                                                      PrefixCache; in use: answer_bytes
    PassageFinder   hashes of the passages' tokens,  the prompt's tokens              32 bytes a passage
                    in a ContentIndex
    Learner         hashes of text seen once         the text, salt                   2 MiB; kept pieces: foreign_cache

The salt is of the view that a question is asked through (`CollectionTable.salt`): KV of other views is never found.
A view has a PassageFinder and counts of its own, and shares the other caches' memory.

All of them follow one `Generation`. After a change of documents, or when passages from elsewhere are forgotten:

    PrefixCache     loses KV of deleted passages, and of text that may quote them: `Prefixes.invalidate`
    StoredPrefixes  finds nothing of an earlier generation, which the next writer deletes: `KVStore.drop_prefixes`
    SharedPrefixes  loses everything: `SharedPrefixes.clear`
    PassageFinder   indexes new passages; reads each passage that it finds from SQL, where deleted ones are missing
    Learner         `KVStore.unlearn` deletes pieces that quote deleted text; what was seen counts as unseen
    KVStore         (`ragcache.store`) drops blocks that other processes deleted: `KVStore.refresh`
"""
