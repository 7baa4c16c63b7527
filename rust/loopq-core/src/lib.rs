//! The core of loopq.
