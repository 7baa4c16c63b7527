//! Runs what [`loopq_core`] made on this machine's processor. No Python in it.
//!
//! | module | what it is |
//! |---|---|
//! | [`matmul`] | activations times packed codes, with the instructions that the processor has |
//! | [`runner`] | a looped decoder from embedding to logits, made of those products |
//!
//! The core's promises hold here too: the same input gives the same bits at any thread count, every refusal is a
//! [`loopq_core::Error`], and long work checks its [`loopq_core::Cancel`].

// Code for the instruction sets of x86-64 is unused elsewhere.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports, unused_mut, unused_variables))]

mod disjoint;
pub mod matmul;
pub mod runner;
