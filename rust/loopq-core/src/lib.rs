//! The core of loopq: streaming Hessians, factorisations, GPTQ and packing. No Python in it.
//!
//! Symbols follow the field: `W` (outputs, inputs) is a weight, `X` (rows, inputs) its input rows, `H = X^T X`,
//! `H_t` the part of `H` that loop step `t` contributed, `g` the group size. Matrices are row-major slices.
//!
//! Three promises hold everywhere and are tested:
//!
//! * the same input gives the same bits at any thread count, block size and chunking;
//! * every refusal is an [`Error`] value that says what was wrong and what to do next;
//! * long work looks at its [`Watch`] many times a second, so that it can be cancelled.
#[cfg(not(target_endian = "little"))]
compile_error!("loopq reads little-endian dumps in place and runs on little-endian machines only");

pub mod dims;
pub mod dump;
pub mod error;
pub mod factor;
pub mod grid;
pub mod hessian;
pub mod pack;
mod pages;
pub mod pool;
pub mod simd;
pub mod solve;
pub mod watch;

pub use error::{Error, Result};
pub use watch::Watch;
