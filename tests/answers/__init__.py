"""Are the answers of ``capacity`` and ``recommend`` true? Random questions, judged by new runs."""
