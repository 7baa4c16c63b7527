//! Codes on a bitshift trellis ([`crate::grid::Trellis`]), searched under `tr(A D S D^T)`.
//!
//! | file | what |
//! |---|---|
//! | `search` | the nearest stream to one column, its rows coupled by `A` |
//! | `solve` | column after column, each making up for those before; then the scales |

mod search;
mod solve;

pub use solve::{solve, TrellisReport};
