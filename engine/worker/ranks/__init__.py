"""Tensor parallel ranks as processes: started, sent steps, their reports merged."""
