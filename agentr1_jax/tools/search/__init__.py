"""Search: passages, retrievers (BM25, over HTTP), and the tool that a policy calls."""

from agentr1_jax.tools.search.bm25 import BM25
from agentr1_jax.tools.search.corpus import fingerprint, read_corpus
from agentr1_jax.tools.search.remote import RemoteRetriever
from agentr1_jax.tools.search.tool import EMPTY_RESULT, Corpus, Hit, Passage, Retriever, RetrieverError, SearchTool

__all__ = [
    "BM25",
    "EMPTY_RESULT",
    "Corpus",
    "Hit",
    "Passage",
    "RemoteRetriever",
    "Retriever",
    "RetrieverError",
    "SearchTool",
    "fingerprint",
    "read_corpus",
]
