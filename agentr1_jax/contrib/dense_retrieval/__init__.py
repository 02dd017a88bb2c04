"""Dense retrieval: a retriever that finds the passages whose vectors are nearest to the query's."""

from agentr1_jax.contrib.dense_retrieval.retriever import make_dense_retriever as make_dense_retriever
