/* Calls functions of kernels/cpu.c for tests/emulated.py, which writes the calls to the standard input. All numbers are int64:
 *
 *     the function, how many buffers
 *     of each buffer: its bytes, whether it is sent back, how many addresses it holds; its content; of each address: where in
 *         the buffer it is, and of which buffer
 *     16 arguments: integers, float64, or numbers of buffers, -1 for NULL
 *
 * The answer is the content of the buffers that are sent back.
 */
#include "cpu.c"
#include <stdio.h>

enum { MOST_BUFFERS = 1024 };

static int64_t number(void) {
    int64_t n;
    if (fread(&n, sizeof n, 1, stdin) != 1) exit(0);
    return n;
}

int main(void) {
    static char *buffer[MOST_BUFFERS];
    static int64_t size[MOST_BUFFERS], back[MOST_BUFFERS], given[16];
    for (;;) {
        const int64_t function = number(), buffers = number();
        if (buffers > MOST_BUFFERS) return 1;
        for (int64_t i = 0; i < buffers; i++) {
            size[i] = number(), back[i] = number();
            int64_t addresses = number();
            buffer[i] = aligned_alloc(64, (size[i] + 64) / 64 * 64);
            if (fread(buffer[i], 1, size[i], stdin) != (size_t)size[i]) return 1;
            for (; addresses; addresses--) { /* of buffers that came before */
                const int64_t at = number(), of = number();
                memcpy(buffer[i] + at, &buffer[of], sizeof(char *));
            }
        }
        for (int i = 0; i < 16; i++) given[i] = number();
        double real[16];
        memcpy(real, given, sizeof given);
#define I(i) given[i]
#define F(i) (float)real[i]
#define P(i) (void *)(given[i] < 0 ? NULL : buffer[given[i]])
        switch (function) {
        case 0: strcpy(buffer[0], fr_isa()); break;
        case 1: fr_linear(I(0), I(1), P(2), I(3), I(4), P(5), F(6), P(7), P(8), I(9), P(10), P(11), I(12)); break;
        case 2: fr_join(I(0), P(1), I(2), I(3), I(4), F(5), P(6), I(7)); break;
        case 3:
            fr_attend(I(0), P(1), P(2), F(3), P(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), P(12), P(13), I(14));
            break;
        case 4:
            fr_layers(I(0), P(1), I(2), P(3), I(4), I(5), P(6), F(7), F(8), P(9), P(10), P(11), P(12), P(13), I(14));
            break;
        case 5: fr_embed(I(0), P(1), I(2), P(3), I(4), P(5), I(6)); break;
        case 6: fr_best(P(0), I(1), I(2), P(3), P(4), I(5)); break;
        case 7:
            fr_store(I(0), P(1), I(2), P(3), F(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), P(12), I(13));
            break;
        default: return 1;
        }
        for (int64_t i = 0; i < buffers; i++) {
            if (back[i]) fwrite(buffer[i], 1, size[i], stdout);
            free(buffer[i]);
        }
        fflush(stdout);
    }
}
