//! The core of loopq: streaming Hessians, factorisations, quantizers and packing. No Python in it.
//!
//! Symbols follow the field. `W` (outputs, inputs) is a weight and `X` (rows, inputs) its input rows. `H = X^T X`, and
//! `H_t` is the contribution of loop step `t`. `g` is the group size. Matrices are row-major slices.
//!
//! A folder holds one subject, and each file in it one operation:
//!
//! | folder | what it is |
//! |---|---|
//! | [`dump`] | input rows, in memory or in a mapped file |
//! | [`hessian`] | exact sums `X^T X` |
//! | [`factor`] | the damped Hessian, factored |
//! | [`grid`] | scales and codes of a group; rounding to nearest |
//! | [`gptq`] | columns rounded one by one, each error made up for in the rest |
//! | [`coordinate`] | codes changed one by one, scales refitted |
//! | [`trellis`] | codes on a trellis, column after column |
//! | [`pack`] | bit layouts of stored codes |
//! | [`simd`] | instruction sets and the register tile; uses nothing else of this crate |
//! | [`dims`], [`memory`], [`execution`], [`process`] | sizes, buffers, threads and forks, for this crate and those on it |
//!
//! Three promises hold everywhere and are tested:
//!
//! * the same input gives the same bits at any thread count, block size and chunking;
//! * every refusal is an [`Error`] value that names the cause and the next action; this includes missing memory for
//!   anything large;
//! * long work checks its [`Cancel`] many times a second.

// Code for the instruction sets of x86-64 is unused elsewhere.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports, unused_mut, unused_variables))]

#[cfg(not(target_endian = "little"))]
compile_error!("loopq reads little-endian dumps in place and runs on little-endian machines only");

mod blocks;
pub mod coordinate;
pub mod dims;
pub mod dump;
pub mod error;
pub mod execution;
pub mod factor;
pub mod gptq;
pub mod grid;
pub mod hessian;
mod lanes;
pub mod memory;
pub mod pack;
pub mod process;
mod proxy;
pub mod simd;
pub mod trellis;
mod weight;

pub use error::{Error, Result};
pub use execution::{Cancel, Execution, MAX_THREADS};
pub use proxy::proxy;
pub use weight::Weight;
