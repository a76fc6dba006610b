"""Caches of KV that earlier questions left, and the index that finds stored passages in prompts.

    cache           holds                            found by                         budget
    --------------  -------------------------------  -------------------------------  ----------------------------------
    PrefixCache     exact KV of prompts and answers  namespace, then token by token   prefix_bytes
    Prefixes        nothing itself: it gives that    a namespace, which is a hash of  that of its PrefixCache
                    KV its namespaces and owners     model, salt and method
    StoredPrefixes  the same KV of plain text, on    a hash of generation, namespace  foreign_cache, with the passages
                    disk                             and all tokens so far            that belong to no document
    SharedPrefixes  contexts placed from blocks      salt, method, passages in order  half of prefix_bytes, lent by the
                                                                                      PrefixCache; in use: answer_bytes
    PassageFinder   hashes of the passages' tokens,  the prompt's tokens              32 bytes a passage
                    in a ContentIndex
    Learner         hashes of text seen once         the text, salt                   2 MiB; kept pieces: foreign_cache

The salt belongs to the view through which a question is asked (`CollectionTable.salt`), so that KV of other views is
never found. Each view has its own PassageFinder and its own counts of read passages (`ReadCounts`). The other caches'
memory is shared by all views.

After a change of documents, or when passages that belong to no document are forgotten (see `Generation`), each cache
does the following:

    PrefixCache     loses KV of deleted passages, and of text that may quote them: `Prefixes.invalidate`
    StoredPrefixes  finds no KV of an earlier generation; the next writer deletes that KV: `KVStore.drop_prefixes`
    SharedPrefixes  loses everything: `SharedPrefixes.clear`
    PassageFinder   indexes new passages; reads each passage that it finds from SQL, where deleted passages are missing
    Learner         loses pieces that quote deleted text (`KVStore.unlearn`); text seen before counts as unseen
    KVStore         (`ragcache.store`) drops blocks that other processes deleted: `KVStore.refresh`
"""
