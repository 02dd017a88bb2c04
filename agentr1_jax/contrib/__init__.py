"""Extensions that the core never imports: tools, retrievers and environments that configs name."""
