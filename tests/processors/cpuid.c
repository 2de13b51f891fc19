// Hides instruction sets from what asks the processor for them by the instruction cpuid, in this thread and those that
// it starts. Linux makes cpuid fault on request; the handler runs it and takes bits away from what it gave.

#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012

static uint32_t hidden_ebx, hidden_ecx, hidden_edx, hidden_eax1, hidden_edx1;

static void run_cpuid(int number, siginfo_t *info, void *context) {
    (void)number;
    (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    if (code[0] != 0x0f || code[1] != 0xa2) { // a fault of another kind: let it happen again, and end the process
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    uint32_t leaf = registers[REG_RAX], subleaf = registers[REG_RCX];
    uint32_t eax = leaf, ebx, ecx = subleaf, edx;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 7 && subleaf == 0) {
        ebx &= ~hidden_ebx;
        ecx &= ~hidden_ecx;
        edx &= ~hidden_edx;
    } else if (leaf == 7 && subleaf == 1) {
        eax &= ~hidden_eax1;
        edx &= ~hidden_edx1;
    }
    registers[REG_RAX] = eax;
    registers[REG_RBX] = ebx;
    registers[REG_RCX] = ecx;
    registers[REG_RDX] = edx;
    registers[REG_RIP] += 2;
}

// Bits of leaf 7: of EBX, ECX and EDX, and of subleaf 1's EAX and EDX. Not 0 if this processor or kernel cannot.
int hide(uint32_t ebx, uint32_t ecx, uint32_t edx, uint32_t eax1, uint32_t edx1) {
    hidden_ebx = ebx;
    hidden_ecx = ecx;
    hidden_edx = edx;
    hidden_eax1 = eax1;
    hidden_edx1 = edx1;
    struct sigaction action = {0};
    action.sa_sigaction = run_cpuid;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, 0);
    return (int)syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
}
