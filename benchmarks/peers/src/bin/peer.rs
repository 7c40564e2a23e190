//! The peer that is timed, with the system's allocator, as in normal use of the crates.
fn main() {
    peers::run();
}
