//! One function for each number of bits and limbs, compiled for an instruction set.

/// Calls a function for a panel's bits, limbs and kind of codes, with tiles of so many tokens of one, two and three limbs.
macro_rules! for_bits_and_limbs {
    ($run:path, $lanes:ty, [$one:literal, $two:literal, $three:literal], $panel:expr) => {{
        use $run as run;
        let panel = $panel;
        match (panel.layout.grid.table().is_some(), panel.layout.grid.bits, panel.rows.limbs) {
            (true, 2, 1) => run::<$lanes, 2, true, 1, $one>(panel),
            (true, 2, 2) => run::<$lanes, 2, true, 2, $two>(panel),
            (true, 2, _) => run::<$lanes, 2, true, 3, $three>(panel),
            (true, 3, 1) => run::<$lanes, 3, true, 1, $one>(panel),
            (true, 3, 2) => run::<$lanes, 3, true, 2, $two>(panel),
            (true, 3, _) => run::<$lanes, 3, true, 3, $three>(panel),
            (true, _, 1) => run::<$lanes, 4, true, 1, $one>(panel),
            (true, _, 2) => run::<$lanes, 4, true, 2, $two>(panel),
            (true, _, _) => run::<$lanes, 4, true, 3, $three>(panel),
            (_, 2, 1) => run::<$lanes, 2, false, 1, $one>(panel),
            (_, 2, 2) => run::<$lanes, 2, false, 2, $two>(panel),
            (_, 2, _) => run::<$lanes, 2, false, 3, $three>(panel),
            (_, 3, 1) => run::<$lanes, 3, false, 1, $one>(panel),
            (_, 3, 2) => run::<$lanes, 3, false, 2, $two>(panel),
            (_, 3, _) => run::<$lanes, 3, false, 3, $three>(panel),
            (_, 4, 1) => run::<$lanes, 4, false, 1, $one>(panel),
            (_, 4, 2) => run::<$lanes, 4, false, 2, $two>(panel),
            (_, 4, _) => run::<$lanes, 4, false, 3, $three>(panel),
            (_, _, 1) => run::<$lanes, 8, false, 1, $one>(panel),
            (_, _, 2) => run::<$lanes, 8, false, 2, $two>(panel),
            _ => run::<$lanes, 8, false, 3, $three>(panel),
        }
    }};
}
pub(in crate::matmul) use for_bits_and_limbs;

/// Calls `streams` for a part's bits and words, with tiles of so many tokens of one and two words.
macro_rules! for_bits_and_words {
    ($lanes:ty, [$one:literal, $two:literal], $part:expr, $out:expr) => {{
        use $crate::matmul::streams::streams as run;
        let part = $part;
        match (part.bits(), part.words()) {
            (2, 1) => run::<$lanes, 2, 1, $one>(part, $out),
            (2, _) => run::<$lanes, 2, 2, $two>(part, $out),
            (3, 1) => run::<$lanes, 3, 1, $one>(part, $out),
            (3, _) => run::<$lanes, 3, 2, $two>(part, $out),
            (_, 1) => run::<$lanes, 4, 1, $one>(part, $out),
            _ => run::<$lanes, 4, 2, $two>(part, $out),
        }
    }};
}
pub(super) use for_bits_and_words;

// Used on architectures with more than the portable version.
/// A function for each number of bits and limbs.
macro_rules! versions {
    ($name:ident, $panel:path, $lanes:ty, $tokens:tt, $features:literal) => {
        /// Multiplies a panel.
        #[target_feature(enable = $features)]
        pub(super) fn $name(p: Panel<'_>) {
            // SAFETY: this function's features are those that the lanes need.
            unsafe { $crate::matmul::versions::for_bits_and_limbs!($panel, $lanes, $tokens, p) }
        }
    };
}
pub(super) use versions;

/// A function for each number of bits and words.
macro_rules! stream_versions {
    ($name:ident, $lanes:ty, $tokens:tt, $features:literal) => {
        /// Multiplies part of a stream.
        #[target_feature(enable = $features)]
        pub(super) fn $name(p: &Part<'_>, out: &mut [f32]) {
            // SAFETY: this function's features are those that the lanes need.
            unsafe { $crate::matmul::versions::for_bits_and_words!($lanes, $tokens, p, out) }
        }
    };
}
pub(super) use stream_versions;
