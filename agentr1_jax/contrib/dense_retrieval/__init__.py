"""Dense retrieval: a retriever that finds the passages whose vectors are nearest to the query's."""

from agentr1_jax.contrib.dense_retrieval.embedder import Embedder
from agentr1_jax.contrib.dense_retrieval.retriever import DenseRetriever, make_dense_retriever

__all__ = ["DenseRetriever", "Embedder", "make_dense_retriever"]
